"""Process of an engine that spans several: python -m tests.mesh.engine_process COORDINATOR N I CASE FILE.

The first process writes the result of a case of engine_cases.py into FILE.
"""

import json
import pathlib
import sys

import jax


def main(coordinator: str, count: str, index: str, case: str, file: str) -> None:
    jax.distributed.initialize(coordinator, int(count), int(index))
    # Imported late, because these modules create arrays.
    from glm5_jax.inference.followers import command_stream
    from glm5_jax.inference.followers.follower import Follower
    from tests.mesh import engine_cases

    stream = command_stream.connect(lambda number: print(f"process {number} is lost"))
    if isinstance(stream, command_stream.CommandSender):
        result = engine_cases.run(case, send=stream.send)
        stream.stop()
        pathlib.Path(file).write_text(json.dumps(result))
    else:
        Follower(*engine_cases.inputs(case), stream, engine_cases.scaled).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
