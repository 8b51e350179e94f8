"""One module per command: HELP, add_arguments(parser), run(options) -> exit code; cli.py lists them."""
