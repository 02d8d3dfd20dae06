"""Draws the picture in tune/README.md: the published study beside this project, by the record and today's predictions.

python -P tests/benchmarks/study_picture.py tune/pictures/study.svg
"""

import sys
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2]))

from tune.suite.study import draw_study

with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "study"}):  # text, and the same file each time
    draw_study().savefig(sys.argv[1], metadata={"Date": None})
