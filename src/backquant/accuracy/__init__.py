"""What quantization costs, where it is lost, and how to buy it back."""
