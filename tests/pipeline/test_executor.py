"""What a Ray of our own consists of while it does pieces: what is needed, and nothing that is only waited for."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from pathlib import Path
import psutil
from infra.cluster import connected
from pipeline.config import TokenizeConfig
from pipeline.plan import make_plan
from pipeline.sources import find
from pipeline.work import do_pieces

def processes():
    titles = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    return [title for title in titles if title]

config = TokenizeConfig(sources=("sample",))
with connected(cpus=1):
    from ray._private.node import Node
    from ray.data._internal import stats
    plan = make_plan(find(config.sources), config)
    summaries = list(do_pieces(plan, Path(sys.argv[1]), "run", workers=1, ours=True))
    print(json.dumps([processes(), sum(summary["books"] for summary in summaries)]))
assert Node.start_monitor.__name__ == "start_monitor", "Ray is as it was"
assert stats.get_or_create_stats_actor.__name__ == "get_or_create_stats_actor"
"""


def test_a_ray_of_our_own_has_no_processes_that_nobody_asks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    titles, books = json.loads(done.stdout)
    assert books == 66
    running = "\n".join(titles)
    assert "raylet" in running, "what is looked for is seen"
    for unneeded in ("dashboard.py", "monitor.py", "Autoscaling", "_StatsActor"):
        assert unneeded not in running
