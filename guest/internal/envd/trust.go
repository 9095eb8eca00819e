package envd

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
)

// Where programs look for the authorities that they trust, by distribution. The first is made where none is there.
var trustBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/ca-bundle.pem",
	"/etc/ssl/cert.pem",
}

// The node's own authority: of the egress gateway, which opens HTTPS connections where the sandbox's rules say so.
// update-ca-certificates takes it over from here when it makes the bundle anew.
const trustFile = "/usr/local/share/ca-certificates/aenv-egress.crt"

const (
	trustBegin = "# AgentENV egress gateway: begin\n"
	trustEnd   = "# AgentENV egress gateway: end\n"
)

// trustEnv names the bundle to programs that bring authorities of their own.
func trustEnv(root string) map[string]string {
	bundle := bundleIn(root)
	return map[string]string{
		"NODE_EXTRA_CA_CERTS": trustFile,
		"SSL_CERT_FILE":       bundle,
		"REQUESTS_CA_BUNDLE":  bundle,
	}
}

func bundleIn(root string) string {
	for _, path := range trustBundles {
		if _, err := os.Stat(filepath.Join(root, path)); err == nil {
			return path
		}
	}
	return trustBundles[0]
}

// validAuthority: one certificate of an authority and nothing else.
func validAuthority(text string) bool {
	block, rest := pem.Decode([]byte(text))
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	return err == nil && cert.IsCA
}

// trust adds the authority to what the programs of the machine trust, in place of an older one of ours. root is where
// the machine's files are.
func trust(root, authority string) error {
	path := filepath.Join(root, trustFile)
	if old, err := os.ReadFile(path); err == nil && string(old) == authority {
		return nil
	}
	bundle := bundleIn(root)
	paths := []string{bundle}
	for _, p := range trustBundles {
		// One file under two names must not be written twice.
		if same(filepath.Join(root, p), filepath.Join(root, bundle)) {
			continue
		}
		if _, err := os.Stat(filepath.Join(root, p)); err == nil {
			paths = append(paths, p)
		}
	}
	var all []error
	for _, p := range paths {
		all = append(all, addTrust(filepath.Join(root, p), authority))
	}
	// Last: whoever finds it finds the bundles done.
	all = append(all, write(path, []byte(authority)))
	return errors.Join(all...)
}

func same(a, b string) bool {
	sa, errA := os.Stat(a)
	sb, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(sa, sb)
}

func addTrust(path, authority string) error {
	old, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	if at := bytes.Index(old, []byte(trustBegin)); at >= 0 {
		if end := bytes.Index(old[at:], []byte(trustEnd)); end >= 0 {
			old = append(old[:at:at], old[at+end+len(trustEnd):]...)
		}
	}
	if len(old) > 0 && old[len(old)-1] != '\n' {
		old = append(old, '\n')
	}
	return write(path, append(old, trustBegin+authority+trustEnd...))
}

// write replaces a file at once, so that nobody reads half of it. Where the path is a link, what it leads to is replaced.
func write(path string, data []byte) error {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".aenv-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
