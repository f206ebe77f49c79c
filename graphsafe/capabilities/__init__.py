"""What a runtime can do here, probed: the capability matrix behind ``graphsafe doctor``."""

from graphsafe.capabilities.matrix import Matrix, Row
from graphsafe.capabilities.run import capabilities, require

__all__ = ["Matrix", "Row", "capabilities", "require"]
