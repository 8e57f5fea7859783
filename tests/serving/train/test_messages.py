"""The compiled messages of the Tinker protocol are those of their .proto file."""

import re
from pathlib import Path

from mlx_packs.serving.train import tinker_pb2

SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")


def test_the_classes_were_compiled_from_this_file():
    file = Path(tinker_pb2.__file__).with_name("tinker.proto")
    declared = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\n\}", file.read_text(), re.DOTALL):
        declared[name] = {
            (field, int(number), bool(repeated), SCALARS.get(kind, kind))
            for repeated, kind, field, number in FIELD.findall(body)
        }

    compiled = {}
    for name, message in tinker_pb2.DESCRIPTOR.message_types_by_name.items():
        compiled[name] = {
            (f.name, f.number, f.is_repeated, f.message_type.name if f.message_type else f.type)
            for f in message.fields
        }
    assert declared == compiled and len(declared) == 13
