#!/bin/sh
# Make a virtual environment with pip: venv.sh DIRECTORY PYTHON..., for the Makefile.
# An environment of uv lacks only pip. Otherwise use the first Python that runs; a shim of pyenv may not run.
directory=$1
shift
if test -e "$directory/bin/activate" && "$directory/bin/python" -m ensurepip >/dev/null 2>&1; then
	exit
fi
for python in "$@"; do
	if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		"$python" -m venv --clear "$directory" && exit
		rm -rf "$directory"
		exit 2
	fi
done
echo "error: none of $* is Python 3.11 or later with venv and ensurepip;" \
	"install it (Debian, Ubuntu: apt install python3-venv) or name one: make PYTHON=/path/to/python3.14" >&2
exit 2
