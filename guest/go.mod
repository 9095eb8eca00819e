module agentenv/guest

go 1.26.0

require (
	connectrpc.com/connect v1.21.1
	golang.org/x/sys v0.50.0
	google.golang.org/protobuf v1.36.12
)
