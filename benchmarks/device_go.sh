#!/usr/bin/env bash
# Runs everything that this checkout was packed for, on the GPU of this machine: bash .device/go 1, then bash .device/go 2.
# Results go to $OUT, or to .device/out if it is not set. A third word is the seconds that the run may take.
# OXIDION_DEVICE is the number of the GPU (0), PYTHON the interpreter that has torch (python3).
set -u
began=$(date +%s.%N)
pack=$(cd "$(dirname "$0")" && pwd)
run=${1:-1}
out=${OUT:-$pack/out}
case $run in 1 | 2) ;; *) echo "usage: bash $0 1|2 [seconds]" >&2; exit 2 ;; esac
mkdir -p "$out" && rm -f "$out/report.json" "$out/log.txt"
# There is a report from the first moment on: it says that nothing has run.
cp "$pack/first-$run.json" "$out/.report.part" && mv "$out/.report.part" "$out/report.json"
cd "$(dirname "$pack")" || exit 2
words=(--run "$run" --began "$began" --pack "$pack" --out "$out")
if [ $# -gt 1 ]; then words+=(--seconds "$2"); fi
# Where a part kills all that it can, the run goes on behind it.
for _ in 1 2 3; do
    "${PYTHON:-python3}" benchmarks/device.py "${words[@]}" && exit 0
    words+=(--resume)
done
exit 1
