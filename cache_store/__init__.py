"""The Target Cache: what it is on disk and in a bucket, how it is written, proven whole and read."""
