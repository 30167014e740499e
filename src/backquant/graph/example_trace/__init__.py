"""Traces that know the example inputs: what ``forward`` asks of sizes and of flags is answered by them."""

from backquant.graph.example_trace.tracer import ExampleTracer

__all__ = ["ExampleTracer"]
