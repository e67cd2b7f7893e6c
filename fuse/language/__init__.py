"""What definitions are written with, and what becomes of them: functions, which give terms when a definition is traced, and
what can be done with any term: walk, evaluate, print it."""

from .functions import *  # noqa: F403
from .functions import __all__ as __all__
