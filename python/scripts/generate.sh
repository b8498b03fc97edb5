#!/bin/sh
# Writes src/libdsec/_proto from ../proto. Needs: pip install 'libdsec[gen]'.
#
# protoc names Python modules after the proto package, which would claim the
# top-level name `dsec`; the imports are moved below libdsec._proto instead.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=src/libdsec/_proto
# Made beside what is there, which goes only once all of the new is whole.
new=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$new"' EXIT
"$python" -c 'import grpc_tools.protoc' 2>/dev/null || {
    echo "generate.sh: $python has no grpc_tools; nothing is changed. Try: $python -m pip install './python[gen]'" >&2
    exit 1
}
(cd ../proto && ls dsec/v1/*.proto | grep -v /edge.proto) | xargs \
    "$python" -m grpc_tools.protoc -I ../proto --python_out="$new" --pyi_out="$new"
touch "$new/dsec/__init__.py" "$new/dsec/v1/__init__.py"
find "$new" -name '*_pb2.py*' -exec sed -i 's/^from dsec\.v1 import/from libdsec._proto.dsec.v1 import/' {} +
rm -rf "$out/dsec"
mv "$new/dsec" "$out/dsec"
touch "$out/__init__.py"
