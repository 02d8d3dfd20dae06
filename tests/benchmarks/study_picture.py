"""Draws the picture in tune/README.md: the published study beside this project, by the record and today's predictions.

python -P tests/benchmarks/study_picture.py tune/pictures/study.svg
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from infra.charts import save
from tune.suite.textbook import draw_predictions

save(draw_predictions(), Path(sys.argv[1]), "svg")
