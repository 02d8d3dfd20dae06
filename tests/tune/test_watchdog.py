"""Ray's own process killed under a driver that waits for it: without the watchdog the wait never ends."""

import subprocess
import sys

DRIVER = """
import os, time
import psutil, ray
from infra.cluster import connected
from tune.watchdog import watching

def lost(part):
    print("lost", part, flush=True)
    os._exit(7)

@ray.remote
def work(seconds):
    time.sleep(seconds)

with connected(cpus=1), watching(lost):
    ray.get(work.remote(0))
    (raylet,) = [child for child in psutil.Process().children() if child.name() == "raylet"]
    raylet.kill()
    ray.wait([work.remote(600)])
    time.sleep(600)
"""


def test_the_death_of_the_raylet_is_noticed() -> None:
    driver = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=120)
    assert "lost raylet\n" in driver.stdout, driver.stderr
    assert driver.returncode == 7
