"""``backquant demo``: train a small residual CNN on real scans, quantize it, and show what happened."""
