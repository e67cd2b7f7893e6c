"""What a kernel compiles to, with no GPU: `tiles.inspect`, and `python -m tiles inspect`."""

from .figures import Figures, figures
from .report import Inspection, inspect

__all__ = ["Figures", "Inspection", "figures", "inspect"]
