"""Search: which operators become what, under a budget of accuracy, time or size that is measured."""
