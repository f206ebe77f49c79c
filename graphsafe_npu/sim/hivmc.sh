#!/bin/sh
# Stands in for CANN's closed "hivmc", the last step of the Ascend compiler (HIVM IR to device code). All steps before it
# are the real compiler's. This one writes no device code; as the real one does, it leaves a libkernel.so that tells
# Triton the workspace size and the number of locks, which it finds in the HIVM IR. It also prints how much of the
# unified buffer the compiler's memory plan takes, in the form that Triton looks for: the last byte of any buffer.
if [ "$1" = --version ]; then echo "hivmc 1.2.0 (simulated by graphsafe)"; exit 0; fi
input=$1
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then shift; output=$1; fi
    shift
done
for file in "$output" "$output.o"; do echo "simulated: no device code" > "$file"; done
awk '
    match($0, /func\.func @[A-Za-z0-9_]*_infer_[a-z_]*_function/) { name = substr($0, RSTART + 11, RLENGTH - 11); next }
    name != "" && match($0, /arith\.constant [0-9]+ :/) {
        split(substr($0, RSTART), word, " "); print "long " name "(void) { return " word[2] "; }"; name = ""
    }
' "$input" | cc -shared -fPIC -x c - -o "$(dirname "$output")/libkernel.so"
case $0 in *-a5) exit 0;; esac  # 950's compiler writes its plan in another form
awk '
    BEGIN { split("i1 1 i8 8 i16 16 f16 16 bf16 16 i32 32 f32 32 i64 64 f64 64", list, " "); for (n = 1; n in list; n += 2) bits[list[n]] = list[n + 1] }
    /hivm\.hir\.pointer_cast/ && /address_space<ub>/ {
        shape = $0; sub(/.*memref</, "", shape); sub(/,.*/, "", shape)
        size = 1; parts = split(shape, part, "x")
        for (n = 1; n < parts; n++) size *= part[n]
        size *= bits[part[parts]]
        offsets = $0; sub(/.*pointer_cast\(/, "", offsets); sub(/\).*/, "", offsets)
        count = split(offsets, offset, ",")
        for (n = 1; n <= count; n++) { gsub(/[^0-9_]/, "", offset[n]); sub(/_.*/, "", offset[n]); if (offset[n] * 8 + size > most) most = offset[n] * 8 + size }
    }
    END { if (most) print "UB size = " most " bits" }
' "$input"
