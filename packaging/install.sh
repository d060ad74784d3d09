#!/bin/sh
# Installs cgpu from its tarball, on a host that takes neither .deb nor .rpm.
#
# usage: ./install.sh [--remove | --purge]
# --remove leaves the configuration and the log, --purge nothing. DESTDIR=DIR installs below DIR,
# for images; then nothing that runs is touched. Root.
set -eu
cd "$(dirname "$0")"
DESTDIR=${DESTDIR:-}
manifest=$DESTDIR/usr/share/cgpu/installed

fail() {
    echo "install.sh: $*" >&2
    exit 1
}
# What of it is the host's configuration, and stays.
is_configuration() {
    case $1 in etc/*) ;; *) return 1 ;; esac
}
script() {
    [ -n "$DESTDIR" ] || sh "scripts/$1" "$2" "${3:-}"
}

verb=${1:---install}
case $verb in
--install | --remove | --purge) ;;
*) fail "unknown: $verb; usage: ./install.sh [--remove | --purge]" ;;
esac
[ "$(id -u)" = 0 ] || [ -n "$DESTDIR" ] || fail "root is needed to write /usr and /etc"
if [ -z "$DESTDIR" ] && dpkg-query -W -f '${Status}' cgpu 2>/dev/null | grep -q ' installed$'; then
    fail "cgpu is installed as a .deb here: apt remove cgpu first, or upgrade that"
fi
if [ -z "$DESTDIR" ] && rpm -q cgpu >/dev/null 2>&1; then
    fail "cgpu is installed as an .rpm here: rpm -e cgpu first, or upgrade that"
fi

if [ "$verb" = --install ]; then
    [ -f files/usr/bin/cgpu ] || fail "files/usr/bin/cgpu is missing: unpack the whole tarball"
    before=
    [ ! -e "$manifest" ] || before=upgrade
    (cd files && find . -type f | sed 's|^\./||' | sort) | while IFS= read -r file; do
        mkdir -p "$DESTDIR/$(dirname "$file")"
        if is_configuration "$file" && [ -e "$DESTDIR/$file" ]; then
            cmp -s "files/$file" "$DESTDIR/$file" || echo "install.sh: kept: $DESTDIR/$file"
            continue
        fi
        # Put in the place of the one that runs in one step: an engine may call it at any time.
        cp -p "files/$file" "$DESTDIR/$file.new"
        [ -n "$DESTDIR" ] || chown 0:0 "$DESTDIR/$file.new"
        mv -f "$DESTDIR/$file.new" "$DESTDIR/$file"
    done
    new=$(cd files && find . -type f | sed 's|^\./||' | sort)
    if [ -n "$before" ]; then
        # What the version before had and this one hasn't.
        while IFS= read -r file; do
            is_configuration "$file" || echo "$new" | grep -qxF "$file" || rm -f "$DESTDIR/$file"
        done < "$manifest"
    fi
    echo "$new" > "$manifest"
    script postinst configure "$before"
    exit 0
fi

[ -e "$manifest" ] || fail "$manifest is missing: cgpu isn't installed by this script"
script prerm remove
while IFS= read -r file; do
    if [ "$verb" = --purge ] || ! is_configuration "$file"; then rm -f "$DESTDIR/$file"; fi
done < "$manifest"
rm -f "$manifest"
for dir in usr/share/cgpu/hooks usr/share/cgpu usr/share/doc/cgpu/docs usr/share/doc/cgpu/hooks usr/share/doc/cgpu; do
    rmdir "$DESTDIR/$dir" 2>/dev/null || true # somebody's own files may lie there
done
script postrm remove
[ "$verb" != --purge ] || script postrm purge
