"""The way of every flow: capture, plan, fuse, prepare, convert, lower; a record goes from step to step."""
