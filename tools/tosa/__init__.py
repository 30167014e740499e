"""Our integer reference beside TOSA's reference model, bit for bit."""
