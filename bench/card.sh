#!/usr/bin/env bash
# Measure one card from end to end, about twelve minutes on an H200:   bash bench/card.sh OUT [PART...]
#   parts: tests step models batch checkpoints loader train small detect     (all where none is named)
# What each program prints goes to OUT/PART.txt, rows of the table to bench/RECORDS.md.
#   PICTURES  folder of pictures that the training files are cut from (else they are drawn)
#   SMALL     data YAML of a small set, for `small`
#   WEIGHTS   weights trained on that set, whose validation is measured then
#   CLIPS     folder of videos, for `detect` (else one is made)
#   PYTHON    interpreter with the packages
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: bash bench/card.sh OUT [PART...]}
shift
parts=${*:-tests step models batch checkpoints loader train small detect}
PYTHON=${PYTHON:-python3}
pictures=()
[ -z "${PICTURES:-}" ] || pictures=(--pictures "$PICTURES")
mkdir -p "$out"

measure() { # SECONDS MODULE ARGUMENT... appends to the part's file; what fails or takes too long does not end the rest
    local limit=$1 module=$2
    shift 2
    echo "== $module $*" >>"$out/$part.txt"
    timeout "$limit" "$PYTHON" -m "$module" "$@" >>"$out/$part.txt" 2>&1 || echo "-- $module ended with $?" >>"$out/$part.txt"
}

for part in $parts; do
    SECONDS=0
    case $part in
        tests) measure 200 pytest -q -m gpu -n 10 -p no:cacheprovider tests ;;
        step) measure 120 bench.train_step --ways torch kernels+graphs --steps 15 --runs 3 --record ;;
        models)
            measure 90 bench.train_step --cfg yolov9-t.yaml yolov9-c.yaml --ways kernels+graphs --steps 10 --runs 2 --record
            measure 60 bench.train_step --dtype bf16 --ways kernels+graphs --steps 10 --runs 2 --record
            ;;
        batch) measure 60 bench.train_step --batch 16 --ways kernels+graphs --steps 30 --runs 2 --record ;;
        checkpoints)
            measure 120 bench.train_step --grad-checkpoint 0 2 3 4 --ways kernels+graphs --steps 10 --runs 2 --record
            ;;
        loader)
            measure 150 bench.augment --make 3200 "${pictures[@]}" --workers 8 16 --pool whole ring --seconds 4 --record
            ;;
        train)
            measure 150 bench.train_e2e --make 2560 "${pictures[@]}" --workers 8 --ways "--augment gpu" "--augment cpu" --record
            ;;
        small)
            if [ -n "${SMALL:-}" ]; then
                measure 90 bench.epoch --data "$SMALL" --cfg yolov9-s.yaml --batch 32 --record
                [ -z "${WEIGHTS:-}" ] || measure 60 bench.validation --data "$SMALL" --weights "$WEIGHTS" --record
            else
                echo "SMALL names no data YAML" >"$out/small.txt"
            fi
            ;;
        detect)
            for video in "${CLIPS:-/nowhere}"/*.mp4 ""; do
                [ -z "$video" ] || [ -f "$video" ] || continue
                if [ -n "$video" ] || [ ! -d "${CLIPS:-/nowhere}" ]; then
                    measure 120 bench.detect --weights yolov9-s.yaml ${video:+--video "$video"} --runs 3 --half --record
                fi
            done
            measure 60 bench.detect --single --weights yolov9-s.yaml --runs 3 --record
            ;;
        *)
            echo "no part $part" >&2
            exit 2
            ;;
    esac
    echo "$part: $SECONDS s"
done
