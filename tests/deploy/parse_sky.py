"""Prints what SkyPilot reads in a file, as JSON; run by the Python that has SkyPilot."""

import json
import sys

from sky.utils import dag_utils

dag = dag_utils.load_dag_from_yaml(sys.argv[1])
tasks = {
    task.name: {
        "num_nodes": task.num_nodes,
        "run": task.run,
        "resources": [
            {"use_spot": one.use_spot, "job_recovery": one.job_recovery} for one in task.resources
        ],
    }
    for task in dag.tasks
}
shown = {"is_job_group": dag.is_job_group(), "primary_tasks": dag.primary_tasks, "tasks": tasks}
print("parsed: " + json.dumps(shown))
