"""TOSA's reference model, and Arm's Vela, as engines that descriptions are tried on."""
