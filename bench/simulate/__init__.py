"""Predicted iteration times of any plan and schedule, for networks and clusters that are not at hand."""

__all__: list[str] = []
