package envd

import (
	"net/http"
	"net/url"
	"testing"
	"time"
)

const testToken = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

func TestSignatureMatchesTheKnownVector(t *testing.T) {
	if got := signature("hello.txt", "read", "user", testToken, ""); got != "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E" {
		t.Fatal(got)
	}
}

func TestTheSignatureMustMatchBeforeTheExpiryIsLookedAt(t *testing.T) {
	now := time.Unix(1000, 0)
	query := url.Values{"path": {"p"}, "signature": {"v1_wrong"}, "signature_expiration": {"1"}}
	if err := authorizeFile(testToken, nil, query, "read", now); err == nil || err.Error() != "invalid signature" {
		t.Fatal(err)
	}
	query.Set("signature", signature("p", "read", "", testToken, "1"))
	if err := authorizeFile(testToken, nil, query, "read", now); err == nil || err.Error() != "signature is already expired" {
		t.Fatal(err)
	}
	query.Set("signature_expiration", "1000")
	query.Set("signature", signature("p", "read", "", testToken, "1000"))
	if err := authorizeFile(testToken, nil, query, "read", now); err != nil {
		t.Fatal(err)
	}
}

func FuzzNoSignatureOpensWithoutTheToken(f *testing.F) {
	f.Add("path=a&signature=v1_x&signature_expiration=1")
	f.Add("signature=v1_&path=")
	f.Fuzz(func(t *testing.T, raw string) {
		query, _ := url.ParseQuery(raw)
		if authorizeFile(testToken, http.Header{}, query, "read", time.Unix(0, 0)) == nil {
			t.Fatalf("%q opened the file", raw)
		}
	})
}
