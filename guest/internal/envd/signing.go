package envd

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const signaturePrefix = "v1_"

// signature covers the path exactly as the client sent it.
func signature(path, operation, user, token, expiration string) string {
	raw := path + ":" + operation + ":" + user + ":" + token
	if expiration != "" {
		raw += ":" + expiration
	}
	sum := sha256.Sum256([]byte(raw))
	return signaturePrefix + base64.RawStdEncoding.EncodeToString(sum[:])
}

// authorizeFile lets a request for a file pass by access token or by a signature over what it does.
func authorizeFile(token string, header http.Header, query url.Values, operation string, now time.Time) error {
	if token == "" {
		return nil
	}
	if given := header.Get("X-Access-Token"); given != "" {
		if sameToken(given, token) {
			return nil
		}
		return errors.New("access token present in header but does not match")
	}
	given := query.Get("signature")
	if given == "" {
		return errors.New("missing signature query parameter")
	}
	expiration := query.Get("signature_expiration")
	if !sameToken(given, signature(query.Get("path"), operation, query.Get("username"), token, expiration)) {
		return errors.New("invalid signature")
	}
	if expiration == "" {
		return nil
	}
	at, err := strconv.ParseInt(expiration, 10, 64)
	if err != nil {
		return errors.New("invalid signature expiration")
	}
	if at < now.Unix() {
		return errors.New("signature is already expired")
	}
	return nil
}
