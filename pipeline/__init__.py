"""The stages of the pipeline, on Ray; each heavy engine is imported in exactly one file."""
