"""Drafters, their loss and their export, in plain PyTorch."""
