import sys
from pathlib import Path

# The examples are scripts: each imports the files beside it, as Python itself has it.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
