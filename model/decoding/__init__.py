"""What one does with a drafter: speculative decoding without loss."""
