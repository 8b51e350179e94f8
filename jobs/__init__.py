"""Entry points: parse the config, make one call, return an exit code."""
