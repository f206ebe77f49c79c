"""The main job on real input: a small language model trained with every step captured, next to the same model eager."""

from graphsafe.demo.run import DemoFigures, run_demo

__all__ = ["DemoFigures", "run_demo"]
