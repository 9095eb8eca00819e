// aenv-guest is both programs of a sandbox: as pid 1 it is init, as `aenv-guest envd` it is the daemon that the SDKs talk to.
package main

import (
	"fmt"
	"os"

	"agentenv/guest/internal/envd"
	"agentenv/guest/internal/pid1"
)

func main() {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "envd":
		os.Exit(envd.Main(os.Args[2:]))
	case len(os.Args) > 1 && os.Args[1] == "version":
		fmt.Println(envd.Version)
	case os.Getpid() == 1:
		pid1.Main()
	default:
		fmt.Fprintln(os.Stderr, "usage: aenv-guest envd [--addr HOST:PORT] | version   (as pid 1: init)")
		os.Exit(2)
	}
}
