#!/bin/bash
# Creates the passwords for compose.yaml as files in the folder "secrets" beside this script. Keeps existing passwords.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets

# Compose mounts these files with their permissions into containers whose processes are not root. All users may
# therefore read the files, but only you can enter their folder.
make() { # Write stdin to the file NAME unless it exists.
    if [[ -s secrets/$1 ]]; then
        cat >/dev/null
    else
        cat >"secrets/$1"
        chmod 644 "secrets/$1"
    fi
}

random() { head --bytes 32 /dev/urandom | sha256sum | cut --characters 1-64 | tr --delete '\n'; }

random | make ray_token
random | make postgres_password
if [[ ! -s secrets/s3_identities || ! -s secrets/aws_credentials ]]; then
    secret=$(random)
    rm -f secrets/s3_identities secrets/aws_credentials
    make s3_identities <<<'{"identities": [{"name": "throughline", "actions": ["Admin", "Read", "Write", "List", "Tagging"],
"credentials": [{"accessKey": "throughline", "secretKey": "'"$secret"'"}]}]}'
    make aws_credentials <<END
[default]
aws_access_key_id = throughline
aws_secret_access_key = $secret
END
fi
echo "the passwords are in $PWD/secrets"
