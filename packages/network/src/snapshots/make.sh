set -e
ip -batch - <<'HOST'
netns add aenv-ab12-3
link add avab12-3 address 02:fc:00:00:00:02 type veth peer name up0 address 02:fc:00:00:00:03 netns aenv-ab12-3
link set avab12-3 addrgenmode none
addr add 10.134.224.6/31 dev avab12-3
neigh replace 10.134.224.7 lladdr 02:fc:00:00:00:03 dev avab12-3 nud permanent
link set avab12-3 up
netns add aenv-ab12-4
link add avab12-4 address 02:fc:00:00:00:02 type veth peer name up0 address 02:fc:00:00:00:03 netns aenv-ab12-4
link set avab12-4 addrgenmode none
addr add 10.134.224.8/31 dev avab12-4
neigh replace 10.134.224.9 lladdr 02:fc:00:00:00:03 dev avab12-4 nud permanent
link set avab12-4 up
HOST

echo 1 > /proc/sys/net/ipv4/conf/avab12-3/forwarding
echo 1 > /proc/sys/net/ipv4/conf/avab12-3/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/avab12-3/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/avab12-3/send_redirects
echo 1 > /proc/sys/net/ipv4/conf/avab12-3/arp_ignore
echo 0 > /proc/sys/net/ipv4/conf/avab12-3/proxy_arp
[ ! -e /proc/sys/net/ipv6/conf/avab12-3 ] || echo 1 > /proc/sys/net/ipv6/conf/avab12-3/disable_ipv6
echo 1 > /proc/sys/net/ipv4/conf/avab12-4/forwarding
echo 1 > /proc/sys/net/ipv4/conf/avab12-4/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/avab12-4/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/avab12-4/send_redirects
echo 1 > /proc/sys/net/ipv4/conf/avab12-4/arp_ignore
echo 0 > /proc/sys/net/ipv4/conf/avab12-4/proxy_arp
[ ! -e /proc/sys/net/ipv6/conf/avab12-4 ] || echo 1 > /proc/sys/net/ipv6/conf/avab12-4/disable_ipv6
set +e
nsenter --net=/run/netns/aenv-ab12-3 sh -s <<'SLOT' &
set -e
ip -batch - <<'IP'
tuntap add tap0 mode tap user 200003 group 200003
link set tap0 address 02:fc:00:00:00:01 addrgenmode none
link set up0 addrgenmode none
addr add 169.254.0.22/30 dev tap0
addr add 10.134.224.7/31 dev up0
link set tap0 up
link set up0 up
neigh replace 169.254.0.21 lladdr 02:fc:00:00:00:05 dev tap0 nud permanent
neigh replace 10.134.224.6 lladdr 02:fc:00:00:00:02 dev up0 nud permanent
route add default via 10.134.224.6 dev up0
IP

echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/all/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/all/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/default/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/default/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/default/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/default/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/up0/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/up0/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/up0/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/up0/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/tap0/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/tap0/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/tap0/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/tap0/arp_ignore
echo 196608 > /proc/sys/net/ipv4/ipfrag_low_thresh
echo 262144 > /proc/sys/net/ipv4/ipfrag_high_thresh
[ ! -e /proc/sys/net/ipv6/conf/all ] || { echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; }
nft -f - <<'NFT'
# rules of slot 3
NFT

echo ok 3
SLOT

nsenter --net=/run/netns/aenv-ab12-4 sh -s <<'SLOT' &
set -e
ip -batch - <<'IP'
tuntap add tap0 mode tap user 200004 group 200004
link set tap0 address 02:fc:00:00:00:01 addrgenmode none
link set up0 addrgenmode none
addr add 169.254.0.22/30 dev tap0
addr add 10.134.224.9/31 dev up0
link set tap0 up
link set up0 up
neigh replace 169.254.0.21 lladdr 02:fc:00:00:00:05 dev tap0 nud permanent
neigh replace 10.134.224.8 lladdr 02:fc:00:00:00:02 dev up0 nud permanent
route add default via 10.134.224.8 dev up0
IP

echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/all/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/all/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/all/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/default/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/default/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/default/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/default/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/default/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/up0/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/up0/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/up0/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/up0/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/up0/arp_ignore
echo 1 > /proc/sys/net/ipv4/conf/tap0/rp_filter
echo 0 > /proc/sys/net/ipv4/conf/tap0/accept_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/secure_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/send_redirects
echo 0 > /proc/sys/net/ipv4/conf/tap0/accept_source_route
echo 0 > /proc/sys/net/ipv4/conf/tap0/proxy_arp
echo 1 > /proc/sys/net/ipv4/conf/tap0/arp_ignore
echo 196608 > /proc/sys/net/ipv4/ipfrag_low_thresh
echo 262144 > /proc/sys/net/ipv4/ipfrag_high_thresh
[ ! -e /proc/sys/net/ipv6/conf/all ] || { echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; }
nft -f - <<'NFT'
# rules of slot 4
NFT

echo ok 4
SLOT

wait