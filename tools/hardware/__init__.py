"""What documented hardware asks of quantization, as descriptions that are tried: docs/hardware.md."""
