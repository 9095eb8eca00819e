ip -force -batch - >/dev/null 2>&1 <<'HOST' || :
link set dev avab12-3 group 182561554
link set dev avab12-4 group 182561554
link del group 182561554
netns del aenv-ab12-3
netns del aenv-ab12-4
HOST

if command -v conntrack >/dev/null; then
conntrack -D -s 10.134.224.6/31 >/dev/null 2>&1 || :
conntrack -D -s 10.134.224.8/31 >/dev/null 2>&1 || :
fi
[ -e /run/netns/aenv-ab12-3 ] || [ -e /proc/sys/net/ipv4/conf/avab12-3 ] || echo gone 3
[ -e /run/netns/aenv-ab12-4 ] || [ -e /proc/sys/net/ipv4/conf/avab12-4 ] || echo gone 4