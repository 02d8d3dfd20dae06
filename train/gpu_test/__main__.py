"""Run one step of the GPU test: a request in JSON on stdin, the result in JSON on the last line of stdout.

``python -m infra.doctor --gpu`` starts this process for each step, so that a step that crashes CUDA or hangs does not
take the others with it. It is no command for users.
"""

import json
import sys

from infra.device.hardware import DeviceInfo
from infra.errors import UserError, first_line
from infra.schema import from_json


def main() -> None:
    """Run the step of the request."""
    request = json.load(sys.stdin)
    try:
        from train.gpu_test.steps import STEPS, Setup

        info = from_json(DeviceInfo, request["facts"], "the request")
        result = STEPS[request["step"]](Setup(request["model"], info, request["values"]))
    except UserError as mistake:
        result = {"outcome": "failed", "summary": str(mistake), "advice": "", "values": None}
    except Exception as failure:  # noqa: BLE001 every failure of a GPU is a result of the test
        from train.loop.memory import is_oom_error

        summary = f"{type(failure).__name__}: {first_line(failure)}"
        advice = "report this with the JSON; a newer driver or another build of torch may help"
        if is_oom_error(failure):
            advice = "stop other processes on the GPU, which nvidia-smi lists, and run it again"
        result = {"outcome": "failed", "summary": summary, "advice": advice, "values": None}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
