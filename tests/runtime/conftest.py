from lowering import flow, tools

__all__ = ["flow", "tools"]
