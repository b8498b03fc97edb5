#!/bin/sh
# Writes src/libdsec/_proto from ../proto. Needs: pip install 'libdsec[gen]'.
#
# protoc names Python modules after the proto package, which would claim the
# top-level name `dsec`; the imports are moved below libdsec._proto instead.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=src/libdsec/_proto
rm -rf "$out/dsec"
(cd ../proto && ls dsec/v1/*.proto | grep -v /edge.proto) | xargs \
    "$python" -m grpc_tools.protoc -I ../proto --python_out="$out" --pyi_out="$out"
touch "$out/__init__.py" "$out/dsec/__init__.py" "$out/dsec/v1/__init__.py"
find "$out" -name '*_pb2.py*' -exec sed -i 's/^from dsec\.v1 import/from libdsec._proto.dsec.v1 import/' {} +
