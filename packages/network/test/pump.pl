# The cable of a fake guest: joins the slot's tap (opened as the slot's user, as a VMM would) with a tap in the guest's
# netns. Lines of hex on stdin are frames to send as the guest; every frame that reaches the guest is printed as hex.
use strict;
use warnings;
my ($slot_ns, $uid, $guest_ns) = @ARGV;
$| = 1;

sub enter {
    open(my $ns, "<", "/run/netns/$_[0]") or die "$_[0]: $!";
    syscall(308, fileno($ns), 0x40000000) == 0 or die "setns $_[0]: $!";
}

sub tap {
    sysopen(my $tun, "/dev/net/tun", 2) or die "/dev/net/tun: $!";
    my $request = pack("a16 S x22", $_[0], 0x1002);    # IFF_TAP | IFF_NO_PI
    ioctl($tun, 0x400454ca, $request) or die "TUNSETIFF $_[0]: $!";
    return $tun;
}

enter($guest_ns);
my $guest = tap("eth0");
enter($slot_ns);
$) = "$uid $uid";
$( = $uid;
$< = $> = $uid;
die "still root" if $< == 0 || $> == 0;
my $slot = tap("tap0");
print "ready\n";

my $input = "";
while (1) {
    my $want = "";
    vec($want, fileno($_), 1) = 1 for ($guest, $slot, \*STDIN);
    select(my $can = $want, undef, undef, undef);
    my $frame;
    if (vec($can, fileno($slot), 1) && sysread($slot, $frame, 65536)) {
        syswrite($guest, $frame);
        print unpack("H*", $frame), "\n";
    }
    syswrite($slot, $frame) if vec($can, fileno($guest), 1) && sysread($guest, $frame, 65536);
    next unless vec($can, fileno(STDIN), 1);
    last unless sysread(STDIN, $input, 65536, length $input);
    syswrite($slot, pack("H*", $1)) while $input =~ s/^([0-9a-f]*)\n//;
}
