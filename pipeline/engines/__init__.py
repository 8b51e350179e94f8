"""The inference engines that run the target."""
