# shellcheck shell=bash
# Shell functions shared by demo.sh and test.sh; to be sourced by them.
#
#   use_environment FILE...   sets PYTHON to an interpreter that has the packages of these requirement files
#
# Settings from outside:
#   YOLO_PYTHON    interpreter of an environment of your own; it is checked and used as it is, nothing is installed
#   YOLO_VENV      folder of the environment made here (default: .venv in the repository)
#   YOLO_PIP_ARGS  further words for "pip install", e.g. "--no-index --find-links wheels"

set -o pipefail # pip_install reads the status of a pipeline
REPO_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
YOLO_VENV=${YOLO_VENV:-$REPO_ROOT/.venv}
NEEDED_GB=12 # PyTorch with its CUDA libraries: 6.5 GB unpacked, and the downloads until that is done
CV2_LIBRARY_PATTERN='cannot open shared object file|DLL load failed'

say() {
    printf -- '-- %s\n' "$*"
}

die() {
    printf 'ERROR: %s\n' "$*" >&2
    exit 1
}

is_recent_python() { # PYTHON
    "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() { # prints the first interpreter of version 3.10 or newer
    local candidate
    for candidate in python3 python3.12 python3.11 python3.10 python3.13 python3.14 python; do
        if is_recent_python "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

check_space() { # FOLDER says so where the file system of FOLDER has less room than an installation takes
    local free
    free=$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 / 1048576) }') || return 0
    if [ -n "$free" ] && [ "$free" -lt "$NEEDED_GB" ]; then
        say "only $free GB are free for $1, and the installation may take $NEEDED_GB; YOLO_VENV=FOLDER puts it elsewhere"
    fi
}

make_venv() { # makes $YOLO_VENV unless it works already, and sets PYTHON to its interpreter
    local base
    PYTHON=$YOLO_VENV/bin/python
    if is_recent_python "$PYTHON" && "$PYTHON" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    base=$(find_python) || die "no Python 3.10 or newer found; install one, e.g. apt-get install python3 python3-venv"
    "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 \
        || die "Python's venv module is missing; type: apt-get install python3-venv"
    say "making the environment $YOLO_VENV with $("$base" --version 2>&1)"
    # --clear: what an interrupted earlier attempt left behind must not stay in the way
    "$base" -m venv --clear "$YOLO_VENV" || die "could not make $YOLO_VENV; is there space, and python3-venv installed?"
}

requirements_stamp() { # FILE... prints a hash of the files' contents and of the Python version
    { cat "$@"; "$PYTHON" --version; } 2>&1 | "$PYTHON" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() { # ARGUMENT... shows what is fetched, keeps the whole output in a log for the case of a failure
    local log=$YOLO_VENV/pip.log line status=0
    # shellcheck disable=SC2086 # YOLO_PIP_ARGS holds several words
    "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off ${YOLO_PIP_ARGS:-} "$@" \
        </dev/null 2>&1 | tee "$log" | while IFS= read -r line; do
        case $line in
            *Downloading\ *MB* | *Downloading\ *GB*) say "pip: ${line#"${line%%[![:space:]]*}"}" ;;
            "Installing collected packages"*) say "pip: unpacking the packages (this can take some minutes)" ;;
        esac
    done || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 15 "$log" >&2
        if grep -q "No space left on device" "$log"; then
            die "the disk is full: free $NEEDED_GB GB (pip keeps old downloads: $PYTHON -m pip cache purge), or set" \
                "YOLO_VENV to a folder on another disk and TMPDIR to one for the downloads, and start again"
        fi
    fi
    return "$status"
}

ensure_cv2() { # OpenCV's usual build needs libGL and glib; where they are missing the headless build takes its place
    local message
    message=$("$PYTHON" -c 'import cv2' 2>&1) && return 0
    if ! printf '%s' "$message" | grep -Eq "$CV2_LIBRARY_PATTERN"; then
        printf '%s\n' "$message" >&2
        die "OpenCV does not load (see above); repair with: $PYTHON -m pip install --force-reinstall opencv-python"
    fi
    touch "$YOLO_VENV/.opencv-headless" # read by write_requirements
    say "system libraries for opencv-python are missing ($(printf '%s' "$message" | tail -n 1)): using opencv-python-headless"
    "$PYTHON" -m pip uninstall -y -q opencv-python opencv-python-headless </dev/null >/dev/null 2>&1 || true
    # both builds share one folder, so the headless one is written anew; NumPy is there already
    pip_install --no-deps --force-reinstall opencv-python-headless || die "opencv-python-headless could not be installed"
    "$PYTHON" -c 'import cv2' || die "OpenCV still does not load; type: apt-get install libgl1 libglib2.0-0"
}

write_requirements() { # TARGET FILE... joins requirement files, with the build of OpenCV that was found to work here
    local target=$1 pattern=''
    shift
    [ ! -f "$YOLO_VENV/.opencv-headless" ] || pattern='s/^opencv-python([^-]|$)/opencv-python-headless\1/'
    cat "$@" | sed -E -e "$pattern" >"$target"
}

missing_packages() { # FILE... prints the required packages that $PYTHON lacks, on one line
    "$PYTHON" - "$@" <<'PY'
import re
import sys
from importlib.metadata import PackageNotFoundError, version

OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")


def is_installed(name):
    for candidate in OPENCV if name == "opencv-python" else (name,):
        try:
            version(candidate)
            return True
        except PackageNotFoundError:
            pass
    return False


lines = [line.split("#")[0].strip() for file in sys.argv[1:] for line in open(file, encoding="utf-8")]
names = [re.split(r"[<>=!~\[; ]", line)[0] for line in lines if line]
print(*[name for name in names if not is_installed(name)])
PY
}

use_own_environment() { # FILE... checks the interpreter named by YOLO_PYTHON
    local missing
    PYTHON=$YOLO_PYTHON
    is_recent_python "$PYTHON" || die "YOLO_PYTHON=$YOLO_PYTHON does not run or is older than Python 3.10"
    missing=$(missing_packages "$@")
    [ -z "$missing" ] || die "YOLO_PYTHON=$YOLO_PYTHON lacks: $missing; type: $PYTHON -m pip install $missing"
    "$PYTHON" -c 'import cv2' || die "OpenCV does not load; type: $PYTHON -m pip install opencv-python-headless"
}

use_environment() { # FILE... sets PYTHON; installs the packages of the requirement files unless that was done before
    local stamp stamp_file names
    local wanted=$YOLO_VENV/requirements.txt
    if [ -n "${YOLO_PYTHON:-}" ]; then
        use_own_environment "$@"
        return 0
    fi
    make_venv
    names=$(basename -a "$@" | tr '\n' '+')
    stamp_file=$YOLO_VENV/.installed-${names%+}
    stamp=$(requirements_stamp "$@")
    if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$stamp" ]; then
        return 0
    fi
    check_space "$YOLO_VENV"
    say "installing ${names%+} (the first time this fetches several GB: PyTorch brings its CUDA libraries)"
    write_requirements "$wanted" "$@"
    pip_install -r "$wanted" || die "installation failed (see above); whole output: $YOLO_VENV/pip.log"
    ensure_cv2
    printf '%s\n' "$stamp" >"$stamp_file"
}

add_optional() { # PACKAGE... tries to add packages; returns non-zero where they cannot be had
    local package
    local -a wanted=()
    for package in "$@"; do
        "$PYTHON" -c "import $package" >/dev/null 2>&1 || wanted+=("$package")
    done
    [ "${#wanted[@]}" -eq 0 ] && return 0
    [ -z "${YOLO_PYTHON:-}" ] || return 1
    say "installing ${wanted[*]}"
    pip_install "${wanted[@]}"
}

free_folder() { # BASE prints BASE, or the first of BASE2, BASE3, … that is not taken
    local number=2 folder=$1
    while [ -e "$folder" ]; do
        folder=$1$number
        number=$((number + 1))
    done
    printf '%s\n' "$folder"
}

best_map() { # CSV prints the best mAP@.5 and mAP@.5:.95 of a results file
    awk -F, 'NR > 1 { if ($8 + 0 >= best) { best = $8 + 0; half = $7 + 0 } }
             END { printf "mAP@.5 %.3f, mAP@.5:.95 %.3f", half, best }' "$1"
}
