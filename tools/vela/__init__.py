"""Arm's Vela as a judge of ``examples/backends/ethos_u*.yaml``. Vela is a tool of these scripts only."""
