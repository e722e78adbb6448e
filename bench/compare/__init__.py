"""All methods in one run: training replayed over emulated hosts, or real training of real models."""

__all__: list[str] = []
