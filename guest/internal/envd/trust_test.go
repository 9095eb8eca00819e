package envd

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func newAuthority(t *testing.T, isCA bool) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  isCA,
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestValidAuthority(t *testing.T) {
	good := newAuthority(t, true)
	if !validAuthority(good) {
		t.Error("an authority is refused")
	}
	for name, text := range map[string]string{
		"nothing":      "",
		"no authority": newAuthority(t, false),
		"two":          good + good,
		"text behind":  good + "x",
		"damaged":      strings.Replace(good, "M", "N", 1),
	} {
		if validAuthority(text) {
			t.Errorf("%s passes", name)
		}
	}
}

func TestTrustReplacesItsOwnOnly(t *testing.T) {
	root := t.TempDir()
	bundle := filepath.Join(root, "/etc/ssl/certs/ca-certificates.crt")
	second := filepath.Join(root, "/etc/ssl/cert.pem")
	if err := os.MkdirAll(filepath.Dir(bundle), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bundle, []byte("others"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("certs/ca-certificates.crt", second); err != nil {
		t.Fatal(err)
	}
	one, two := newAuthority(t, true), newAuthority(t, true)
	for _, authority := range []string{one, one, two} {
		if err := trust(root, authority); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(second)
		if err != nil {
			t.Fatal(err)
		}
		if want := "others\n" + trustBegin + authority + trustEnd; string(got) != want {
			t.Errorf("the bundle is %q, not %q", got, want)
		}
		if kept, _ := os.ReadFile(filepath.Join(root, trustFile)); string(kept) != authority {
			t.Errorf("the file is %q", kept)
		}
	}
	if st, err := os.Lstat(second); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Error("the link was replaced by a file")
	}
}

func TestTrustWithoutABundle(t *testing.T) {
	root := t.TempDir()
	authority := newAuthority(t, true)
	if err := trust(root, authority); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(root, trustBundles[0]))
	if err != nil || string(got) != trustBegin+authority+trustEnd {
		t.Errorf("the bundle is %q: %v", got, err)
	}
	if env := trustEnv(root); env["SSL_CERT_FILE"] != trustBundles[0] {
		t.Errorf("SSL_CERT_FILE is %q", env["SSL_CERT_FILE"])
	}
}
