"""An op and a kernel of your own."""

from .limits import clamp
from .norms import rms_norm

__all__ = ["clamp", "rms_norm"]
