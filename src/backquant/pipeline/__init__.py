"""The steps of every flow: capture, plan, fuse, prepare, convert, lower; a record goes from one to the next."""
