#!/usr/bin/env bash
# Fails when proto/ breaks clients of the last release: buf's rules (buf.yaml) against the newest git tag that has a proto/.
# Usage, in the root of the repository: proto/check_breaking.sh BUF
set -euo pipefail
buf=$1
if [[ $(git rev-parse --is-shallow-repository) == true ]] && ! git fetch --quiet --depth 1 origin 'refs/tags/*:refs/tags/*'; then
    echo "this clone is shallow, and its tags cannot be fetched from origin: only those that it has are looked at" >&2
fi
for tag in $(git tag --list --sort=-creatordate); do
    if git cat-file -e "$tag:proto" 2> /dev/null && git cat-file -e "$tag:buf.yaml" 2> /dev/null; then
        released=$(mktemp -d)
        trap 'rm -rf "$released"' EXIT
        git archive "$tag" proto buf.yaml | tar -x -C "$released"
        "$buf" breaking --against "$released"
        echo "proto/ breaks nothing that $tag has"
        exit 0
    fi
done
echo "proto/ is not compared: no git tag has a proto/, so there is no release whose clients could break"
