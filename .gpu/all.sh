real=$OUT; export OUT=/tmp/results; rm -rf $OUT; mkdir -p $OUT
for n in "$@"; do (cd .gpu/$n; start=$SECONDS; timeout 50 bash run.sh > $OUT/$n.console 2>&1; echo "rc $? $((SECONDS-start)) s" >> $OUT/$n.console); tail -3 $OUT/$n.console | cut -c1-300; (cd $OUT; tar czf $real/$n.tgz $n $n.console); done
ls -la $real
