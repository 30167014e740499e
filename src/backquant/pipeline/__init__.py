"""The steps of every flow: capture, plan, fuse, prepare, convert, lower. A record goes with the model."""
