#!/usr/bin/env bash
# Show the whole way on pictures rendered here: train, validate, detect, export, detect with the exported file.
#   bash scripts/demo.sh          takes less than ten minutes on two CPU cores; uses the GPU if there is one
# Each setting can be given from outside, e.g.  EPOCHS=40 IMAGE_SIZE=320 bash scripts/demo.sh
set -euo pipefail

CFG=${CFG:-yolov9-t.yaml}
HYP=${HYP:-hyp/hyp.demo.yaml}
EPOCHS=${EPOCHS:-24}
BATCH=${BATCH:-32}
IMAGE_SIZE=${IMAGE_SIZE:-128}
NUM_CLASSES=${NUM_CLASSES:-3}
TRAIN_PICTURES=${TRAIN_PICTURES:-640}
VAL_PICTURES=${VAL_PICTURES:-64}
TEST_PICTURES=${TEST_PICTURES:-12}
CONFIDENCE=${CONFIDENCE:-0.25}
WORKERS=${WORKERS:-2}
DEVICE=${DEVICE:-} # empty: the first GPU, or the CPU where there is none
# Further words for train_dual.py. So short a run needs an optimizer step after every batch, not every 64 pictures.
TRAIN_ARGS=${TRAIN_ARGS:---optimizer AdamW --accumulate 1}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$REPO_ROOT"

step() {
    printf '\n== %s (%d s)\n' "$*" "$SECONDS"
}

use_environment requirements.txt
SECONDS=0 # counts from here: the installation is no part of the demonstration
out=$(free_folder runs/demo)
data=$out/pictures/shapes.yaml
common=(--imgsz "$IMAGE_SIZE" --device "$DEVICE" --project "$out")

step "1/6 rendering pictures"
"$PYTHON" scripts/make_shapes.py --folder "$out/pictures" --train "$TRAIN_PICTURES" --val "$VAL_PICTURES" \
    --test "$TEST_PICTURES" --size "$IMAGE_SIZE" --classes "$NUM_CLASSES"

step "2/6 training $CFG for $EPOCHS epochs"
# shellcheck disable=SC2086 # TRAIN_ARGS holds several words
"$PYTHON" train_dual.py --weights "" --cfg "$CFG" --data "$data" --hyp "$HYP" --epochs "$EPOCHS" \
    --batch-size "$BATCH" --workers "$WORKERS" "${common[@]}" --name train $TRAIN_ARGS
weights=$out/train/weights/best.pt

step "3/6 validating $weights on the test pictures"
"$PYTHON" val_dual.py --weights "$weights" --data "$data" --task test --batch-size "$BATCH" --workers "$WORKERS" \
    "${common[@]}" --name val

step "4/6 detecting in test pictures"
"$PYTHON" detect_dual.py --weights "$weights" --source "$out/pictures/images/test" --conf-thres "$CONFIDENCE" \
    "${common[@]}" --name detect

onnx_note="left out (onnx and onnxruntime could not be installed)"
step "5/6 exporting to ONNX"
if add_optional onnx onnxruntime; then
    "$PYTHON" export.py --weights "$weights" --include onnx --imgsz "$IMAGE_SIZE"
    step "6/6 detecting with the ONNX file"
    "$PYTHON" detect_dual.py --weights "${weights%.pt}.onnx" --source "$out/pictures/images/test" \
        --conf-thres "$CONFIDENCE" "${common[@]}" --device cpu --name detect_onnx
    onnx_note="${weights%.pt}.onnx, its detections: $out/detect_onnx"
else
    say "$onnx_note"
fi

step "done"
cat <<TEXT
accuracy     $(best_map "$out/train/results.csv") on $VAL_PICTURES validation pictures
training     $out/train (report.html for the browser, results.csv, weights/best.pt)
validation   $out/val (curves, confusion matrix, pictures with labels and predictions)
detections   $out/detect (look at the pictures)
ONNX         $onnx_note
TEXT
