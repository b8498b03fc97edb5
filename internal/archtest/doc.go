// Package archtest holds no code, only tests that read the whole module: the
// import table in imports.txt is kept, every package says what it is for, and
// no file grows past what a person reads in one sitting.
package archtest
